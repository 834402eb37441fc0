-- Begins a history where there is none. Returns {id, seconds until it is open to reservations}.
local raw = redis.call('GET', prefix .. ':epoch')
local epoch
if raw then
  epoch = cmsgpack.unpack(raw)
else
  epoch = {call.fresh, now + call.grace_s}
  redis.call('SET', prefix .. ':epoch', cmsgpack.pack(epoch))
end
return cmsgpack.pack({epoch[1], math.max(0, epoch[2] - now)})
