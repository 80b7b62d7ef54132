"""The two JSON schemas of the contract, as package data."""
