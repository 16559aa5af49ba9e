"""Where feature maps come from: sources, statistics, batches, and the error of replays."""
