"""One stream's protocol as data: how it is read, how it is served, and where its readers stand."""
