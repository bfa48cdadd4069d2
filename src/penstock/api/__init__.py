"""What `import penstock` shows."""
