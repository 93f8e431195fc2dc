"""The parts of `TorchBackend`: one file for each operation, and the step that they share."""
