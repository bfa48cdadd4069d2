"""From a dataset and what `distribute` was asked for to a job that can be sent: checked, encoded, its splits dealt."""
