"""What was planned beside what happened: the report of a run, and what to change.

The room reads the folder that a run wrote, which may have been copied from elsewhere, may be half
written, and may be of another version. Nothing here imports torch.
"""
