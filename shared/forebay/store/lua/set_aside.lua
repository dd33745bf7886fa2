-- Sets something that a reader cannot read aside: what, where, why, its first bytes.
-- uses _partitions
-- ARGV: epoch of a partition's owner or '', name of the stream that it is an entry of or '', entry, id, where, reason,
-- sample, partition.
-- An entry leaves its stream. Returns 1 the first time, 0 if that was done before, -1 if fenced.
local epoch, stream = ARGV[1], ARGV[2]
if epoch ~= '' and partition_fenced(ARGV[8], epoch) then return -1 end
if stream ~= '' and call('XDEL', key(stream), ARGV[3]) == 0 then return 0 end
return set_aside(ARGV[4], ARGV[5], ARGV[6], ARGV[7])
