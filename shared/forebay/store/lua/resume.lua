-- Lets a run that has stopped itself go on, with all its budgets anew. Returns 1 if it had stopped; -1, and nothing has
-- changed, where Redis has gone back in time: then it is to be reconciled.
if call('HEXISTS', STATE, 'rolled_back') == 1 then return -1 end
local had = call('HDEL', STATE, 'stopped')
for _, field in ipairs(call('HKEYS', STATE)) do
  if string.find(field, '^streak:') or string.find(field, '^failed:') then call('HDEL', STATE, field) end
end
wake('admission')
return had
