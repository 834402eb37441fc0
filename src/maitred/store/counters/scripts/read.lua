-- The state of counters: {'read', readings}, or {'unknown', budgets}.
local refusal = barred(false)
if refusal then return refusal end
reclaim(RECLAIMED)

local unknown = prepare(call.claims)
local answer
if #unknown > 0 then
  answer = cmsgpack.pack({'unknown', unknown})
else
  answer = cmsgpack.pack({'read', readings(call.claims)})
end
save()
return answer
