"""Pipeline schedules as data: who computes what in which order, without torch."""
