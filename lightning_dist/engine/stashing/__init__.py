"""Weight versions of asynchronous schedules, and how stale they are."""
