"""One partition's log on disk: its rows, its recovery, its producers and the epochs it is judged by."""
