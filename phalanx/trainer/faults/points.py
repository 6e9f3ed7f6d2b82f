"""Every named point, with where it lies; a test holds the list against code and runs."""

POINTS: dict[str, str] = {
    "start": "a rank has joined the others, and nothing is built yet",
    "resume.before": "a checkpoint is chosen, and nothing of it is loaded",
    "resume.after": "its state is loaded",
    "step.before": "the batch of a step is here, and its work has not begun",
    "forward": "a block, or another part of a stage, has gone forward with a micro-batch",
    "product": "a sampled product is computed, and about to be held against its checksum",
    "reduce": "the gradient of a unit on this rank is complete, and about to be reduced",
    "loss": "the loss of a rank is about to be added to those of the others",
    "step.before_update": "gradients are reduced, and the weights have not moved",
    "step.after": "the weights have moved, and nothing is told of the step",
    "step.told": "the step stands in the metrics",
    "message": "a message is about to be issued; `purpose` says which",
    "save.begin": "a checkpoint is due, and nothing of it is copied",
    "save.copied": "its tensors are copied, and are written while training goes on",
    "save.write": "a part of a shard is about to be written, in the background",
    "save.written": "the shard of a rank is on the disk, and nobody knows it yet",
    "save.commit": "every shard and the manifest are on the disk, under a hidden name",
    "save.tidy": "the checkpoint has its name, and older ones are about to be removed",
    "validation": "a batch of held-out text is about to be measured",
    "end": "the last step is done, and its checkpoint is not known to be on the disk",
}
