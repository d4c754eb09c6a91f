"""What a run tells: metrics, timers, the log, the progress line, the report."""
