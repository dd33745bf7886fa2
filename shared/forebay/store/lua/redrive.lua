-- Submits the prompt of a group with dead letters again, as a new group that names the old one as its parent.
-- ARGV: task, a word that is the call's own, so that its repetition changes nothing, and 1 to submit although the prompt
-- has come again already, or was delivered with the slots that it had.
-- Returns {'created' | 'exists', new task}, {'unknown'}, {'no_prompt'}, {'open', state}, {'delivered'}, {'stopped', reason},
-- or what `queue_full` gives. uses _bounds
-- Refused when memory is short.
local task, word, again = ARGV[1], ARGV[2], ARGV[3] == '1'
local d = dead_key(task)
if call('EXISTS', d) == 0 then return {'unknown'} end
local last, following, ended = unpack(call('HMGET', d, 'word', 'next', 'end'))
if last == word then return {'created', following} end
if following and not again then return {'exists', following} end
local state = ended or call('HGET', group_key(task), 'st')
if state == 'delivered' and not again then return {'delivered'} end
if not ended and state and state ~= 'delivered' then return {'open', state} end
local spec, rules, size, direct, label = unpack(call('HMGET', d, 'spec', 'rules', 'n', 'ch', 'key'))
if not spec then return {'no_prompt'} end
local stopped = call('HGET', STATE, 'stopped')
if stopped then return {'stopped', stopped} end
local full = queue_full(direct, #spec + #rules)
if full then return full end
local child = put_in_queue(spec, rules, size, direct, 'parent', task, 'key', label)
call('HSET', d, 'next', child, 'word', word)
if direct == '' then call('HDEL', STATE, 'eod') end
count('submitted')
count('redriven')
return {'created', tostring(child)}
