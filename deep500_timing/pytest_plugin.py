"""Nothing: for environments whose installed entry points still name this module. It goes with their next set-up."""
