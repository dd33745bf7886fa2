-- No more groups will be submitted: the last batch may be partial, and readers come to an end.
call('HSET', STATE, 'eod', 1)
wake('cutter')
return 1
