-- Who collects: changes nothing. uses _partitions
-- Returns {leader or '', {live collector, ...}, {{partition, owner or '', entries}, ...}}.
local out = {}
for _, p in ipairs(needed()) do
  out[#out + 1] = {p, call('GET', partition_lease(p)) or '', call('XLEN', key('results:' .. p))}
end
return {call('GET', key('lease:collector')) or '', live(now_ms()), out}
