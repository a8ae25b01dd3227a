-- HAProxy's json_query reads 20 levels. This finds "model" of the outermost object at any depth of the others.
core.register_action("read_model", {"http-req"}, function(txn)
  local text, position, depth = txn.sf:req_body(), 1, 0
  while text do
    local at, _, mark = text:find('(["{}%[%]])', position)
    if not at then return end
    position = at + 1
    if mark == "{" or mark == "[" then depth = depth + 1
    elseif mark ~= '"' then depth = depth - 1
    else
      local ending = text:find('["\\]', at + 1)
      while ending and text:sub(ending, ending) == "\\" do ending = text:find('["\\]', ending + 2) end
      if not ending then return end
      local model = depth == 1 and text:sub(at, ending) == '"model"' and text:match('^%s*:%s*"([^"\\]*)"', ending + 1)
      if model then txn:set_var("txn.name", model) return end
      position = ending + 1
    end
  end
end)

core.register_action("wake", {"http-req"}, function(txn)
  local socket, answer = core.tcp(), nil
  socket:settimeout(7200)
  if socket:connect("unix@KEEPER") then
    socket:send("GET /wake/" .. txn:get_var("txn.backend") .. " HTTP/1.0\r\n\r\n")
    answer = socket:receive("*l")
  end
  socket:close()
  if not (answer and answer:find(" 200 ")) then txn:set_var("txn.failed", "yes") end
end)
