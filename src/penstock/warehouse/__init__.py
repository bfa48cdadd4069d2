"""Feature tables: Parquet files under a Delta log, their features, layout and lifecycle."""
