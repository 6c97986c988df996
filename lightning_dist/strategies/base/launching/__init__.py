"""The processes of a run: checked, started and watched."""
