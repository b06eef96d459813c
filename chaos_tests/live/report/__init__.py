"""What a live run leaves: summary, report, campaign page and ledger."""
