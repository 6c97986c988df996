"""Meters that take measurements on a rank."""
