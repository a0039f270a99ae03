"""The command line: traces, the scheduler that replays them, and what is asked of a replay."""
