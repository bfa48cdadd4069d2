"""What a pipeline does as a stream of a job, and not alone: read the splits that a feed names, keep its share of the
elements, give rounds to several consumers, go on with what other streams left."""
