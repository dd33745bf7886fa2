-- The prompt of an idempotency key may be submitted again. ARGV: key, the task that it named. Returns 1 if it did.
local name = key('submitted:' .. ARGV[1])
if call('GET', name) ~= ARGV[2] then return 0 end
return call('DEL', name)
