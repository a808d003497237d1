"""What a plan really saves: training steps in fresh processes, and a search over plans by what they measure."""
