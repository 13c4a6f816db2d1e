"""What ``python -m flashsdk`` runs: info, demo, verify, bench and config, and the tools they share."""

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended
