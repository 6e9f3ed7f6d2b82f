"""One file for each part of the page: functions from a state to records and pictures."""
