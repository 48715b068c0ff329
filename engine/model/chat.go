package model

import "strings"

// ChatTemplate is what a saved checkpoint tells stock engines about chats. ChatPrompt gives the same
// text.
const ChatTemplate = `{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}{{ 'assistant: ' }}`

// Message is one turn of a chat.
type Message struct{ Role, Content string }

// ChatPrompt is the prompt of a chat: a line per turn, and the beginning of the assistant's.
func ChatPrompt(messages []Message) string {
	var b strings.Builder
	for _, m := range messages {
		b.WriteString(m.Role)
		b.WriteString(": ")
		b.WriteString(m.Content)
		b.WriteByte('\n')
	}
	b.WriteString("assistant: ")
	return b.String()
}
