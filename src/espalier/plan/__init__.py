"""Who does what? Decides; touches no tensor and no process group."""
