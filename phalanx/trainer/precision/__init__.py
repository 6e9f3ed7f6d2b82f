"""In which number formats a step computes, and what keeps its update right in low precision."""
