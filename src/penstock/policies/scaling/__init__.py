"""How many workers a job is worth: one file a policy, all with the same `decide`, and what they are made of."""
