"""What the command line and the console share: changes that are shown before they are made, times, sizes and events."""
