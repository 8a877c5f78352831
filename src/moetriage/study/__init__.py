"""The matched study of admission policies: what is run (spec), running it cell by cell (run), and what is said about it (report)."""
