-- Begins a history where there is none. Returns {id, seconds until it is open to reservations, now}. It always writes,
-- so that a Redis that takes no writes counts as away.
local raw = redis.call('GET', prefix .. ':epoch')
local epoch = raw and cmsgpack.unpack(raw) or {call.fresh, now + call.grace_s}
redis.call('SET', prefix .. ':epoch', cmsgpack.pack(epoch))
return cmsgpack.pack({epoch[1], math.max(0, epoch[2] - now), now})
