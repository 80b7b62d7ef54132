"""Pictures and traces of plans and of measurements. Reads plans; changes nothing."""
