"""The results of live runs: summary, report, campaign page and ledger."""
