"""What ``python -m flashsdk`` runs, a module a command, and the tools they share."""

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended
