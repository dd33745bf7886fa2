-- A collector gives a partition up. uses _partitions
-- ARGV: collector, partition. Returns 1 if it was its own.
return let_go(ARGV[2], ARGV[1])
