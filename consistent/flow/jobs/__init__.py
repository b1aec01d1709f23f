"""Jobs: functions of placeholders, their arguments, results and settings."""
