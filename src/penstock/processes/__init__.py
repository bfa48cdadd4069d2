"""The processes of a service: who starts them, who looks after them, and what they send each other."""
