"""Speed and memory, shown as ratios measured in one run; see docs/benchmarks.md."""
