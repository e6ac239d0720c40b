"""What watches a run: phases, progress, alarms, trackers, and faults on request."""
