"""Who brings workers: engines that run `penstock worker` somewhere, and how many the service wants of each."""
