-- Puts off the end of leases that have not expired; they belong to the caller from then on. Returns {'renewed', leases}.
local refusal = barred(false)
if refusal then return refusal end

local renewed = {}
for _, lease in ipairs(call.leases) do
  local ends = redis.call('ZSCORE', ENDS, 'l' .. lease)
  if ends and tonumber(ends) > now then
    take_over(lease)
    redis.call('ZADD', ENDS, now + call.lease_s, 'l' .. lease)
    renewed[#renewed + 1] = lease
  end
end
reclaim(RECLAIMED)
save()
return cmsgpack.pack({'renewed', renewed})
