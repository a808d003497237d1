"""Plans measured: training steps in fresh processes, and a search for the plan with the lowest measured peak."""
