"""The layer that knows Megatron: hook, flags, schedule, profile, patcher, CPU stand-in."""
