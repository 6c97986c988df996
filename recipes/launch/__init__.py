"""Files and scripts that launch the recipes; docs/launchers.md says how."""
