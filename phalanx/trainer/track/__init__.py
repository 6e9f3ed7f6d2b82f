"""Trackers that a run may be followed in: TensorBoard, Weights & Biases, MLflow, Aim."""
