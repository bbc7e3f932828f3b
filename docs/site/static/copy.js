// A button that copies a code block, without the prompts and outputs of console and Python sessions.
const PROMPT = /^(?:>>>|\.\.\.|\$) ?/

function source(text) {
  const lines = text.trimEnd().split("\n")
  const typed = lines.filter((line) => PROMPT.test(line))
  return typed.length ? typed.map((line) => line.replace(PROMPT, "")).join("\n") : lines.join("\n")
}

for (const block of document.querySelectorAll("div.highlight")) {
  const button = document.createElement("button")
  button.className = "copy"
  button.type = "button"
  button.textContent = "Copy"
  button.setAttribute("aria-label", "Copy this code")
  button.addEventListener("click", async () => {
    let done = "Copied"
    try {
      await navigator.clipboard.writeText(source(block.querySelector("pre").textContent))
    } catch {
      done = "Not allowed" // pages opened from disk have no clipboard in some browsers
    }
    button.textContent = done
    setTimeout(() => (button.textContent = "Copy"), 1500)
  })
  block.append(button)
}
