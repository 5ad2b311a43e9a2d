"""What everything stands on: keys, clocks, warnings, plug-ins. Imports nothing of the package but its exceptions."""
