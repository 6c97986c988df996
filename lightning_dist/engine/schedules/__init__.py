"""Pipeline schedules as data: the order of each rank's actions, without torch."""
