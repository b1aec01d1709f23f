"""Jobs: functions that run on all devices, with their arguments, results and settings."""
