"""What a run shows and leaves: metrics, samples, summary, live panel, health checks."""
